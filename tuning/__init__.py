"""Tuning: plan, compile, measure, rank and publish. Uses ``tilekern``; a training job never imports it."""
