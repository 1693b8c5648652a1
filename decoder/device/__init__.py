"""The selector for logits that live on an accelerator: batched, of fixed shapes, and nothing the host has to wait for."""

from decoder.device.captured import CapturedSearch
from decoder.device.search import search_on_device
from decoder.device.tables import DeviceOrder, DeviceTrees, DeviceTrellis

__all__ = ["CapturedSearch", "DeviceOrder", "DeviceTrees", "DeviceTrellis", "search_on_device"]
