"""What does one head do?"""
