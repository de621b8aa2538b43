"""How bytes move between ranks that share no memory."""
