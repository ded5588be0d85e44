"""Recipes: what people do with a partitioner, each a module of plain functions.

`shard` (your own parameters), `hf_t5` (Hugging Face's T5), `bloom` (inference), `distill`, for training a part `freeze`
and `lora`. Rules alone, by the family of models: `hf_t5`, `bloom`, `gpt2`, `opt`, `llama`, `whisper`.
"""
