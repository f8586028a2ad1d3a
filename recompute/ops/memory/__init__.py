"""Copies between the device's memory and the host's."""
