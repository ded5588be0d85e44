"""What other libraries have written, read here and written back: Hugging Face's folders."""
