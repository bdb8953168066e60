"""A LoRA drawn by a running ComfyUI: its interface for programs, a workflow with the LoRA put in, the pictures."""
