"""The decode loop: proposers, one round, the loop on the device."""
