"""What two methods or more share."""
