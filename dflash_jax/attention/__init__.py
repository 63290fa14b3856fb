"""Attention layers: functions that give a model's queries the keys they may see."""
