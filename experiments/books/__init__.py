"""Small models on real books: does a memory help beyond the window?"""
