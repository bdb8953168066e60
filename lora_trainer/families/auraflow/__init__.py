"""The family of AuraFlow, and of what is made from it."""
