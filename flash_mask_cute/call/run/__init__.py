"""What runs each time a prepared call is used."""
