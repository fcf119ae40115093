"""Read and write weights and tokenizers in the formats of this project and of other projects."""
