"""Between text and token ids: the tokenizer and grammars."""
