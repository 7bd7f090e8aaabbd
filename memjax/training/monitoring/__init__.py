"""What a run says of itself: speed, use of its devices, lost time, where it goes."""
