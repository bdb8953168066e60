"""Counts the bytes of every tensor storage that is alive, as an allocator would see them."""

from __future__ import annotations

from lora_trainer.network.live_storages import LiveStorages

LiveBytes = LiveStorages
