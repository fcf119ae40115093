"""Read and write weights and tokenizers in the forms of this project and of others."""
