"""The methods that qualms is compared with."""
