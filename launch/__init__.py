"""What `run_accelerate.sh` decides before the processes start."""

import common  # noqa: F401  imported first: it sets how long OpenMP's threads spin
