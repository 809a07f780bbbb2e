"""The nodes of a job meet, compare what they have, try the network between them, and stay in touch."""
