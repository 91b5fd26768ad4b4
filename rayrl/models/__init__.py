"""Model folders: reading, importing, loading, exporting, and their tokenizers."""
