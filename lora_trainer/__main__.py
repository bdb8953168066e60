"""`python -m lora_trainer` and `accelerate launch -m lora_trainer`: the same as `lora-train`."""

from lora_trainer.cli.main import main

if __name__ == "__main__":
    main()
