"""What may be loaded, by whom it was made and who could have changed it."""
