"""What client and server say to each other. Both sides import it; it imports neither."""
