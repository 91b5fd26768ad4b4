"""Where prompts come from: sources of rows, and the resumable stream over them."""
