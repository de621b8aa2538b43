"""How a process becomes a rank: the launch is found, the ranks meet, and leave at the end."""
