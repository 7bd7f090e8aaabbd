"""Notes in real text: does a memory hold what as many bytes of text lose?"""
