"""What the processor's and the device's runtimes share."""
