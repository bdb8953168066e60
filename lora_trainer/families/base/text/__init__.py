"""Text encoders and tokenizers, as families share them."""
