"""What differs between the devices that a runner can work on."""
