"""The page report.html: charts, numbers, samples and settings of runs."""
