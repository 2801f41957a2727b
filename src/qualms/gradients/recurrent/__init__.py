"""Recurrent layers step by step."""
