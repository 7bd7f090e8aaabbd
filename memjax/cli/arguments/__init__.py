"""From words to the call of a command, or to what is wrong with them."""
