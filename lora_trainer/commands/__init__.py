"""What each word after `lora-train` does; `table` lists the words, `cli` runs them."""
