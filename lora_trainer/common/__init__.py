"""What every room uses: errors, events, files, randomness, words; nothing of training."""
