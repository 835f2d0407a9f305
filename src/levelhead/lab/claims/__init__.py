"""The claims, one module each; `levelhead.lab._experiment` says what a module must have."""
