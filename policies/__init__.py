"""What is allowed, reserved and preferred: presets as data, admission rules with ids."""
