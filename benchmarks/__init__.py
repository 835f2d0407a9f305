"""The benchmark: Levelhead against the other CPU attentions, and against the machine itself."""
