"""The T5 encoder-decoder with T5X's parameter tree and logical axes."""
