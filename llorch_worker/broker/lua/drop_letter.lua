-- Delete a dead letter.
--
-- Returns 1, or 0 if it was already gone.
--
-- Parts: letters

return drop_letter(ARGV[1]) and 1 or 0
