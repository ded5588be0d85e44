"""Recipes: what is ready to use for models that many people hold. Each is a module of plain data and functions.

Rules, by the family of models: `hf_t5`, `bloom`, `gpt2`, `opt`, `llama`, `whisper`.
"""
