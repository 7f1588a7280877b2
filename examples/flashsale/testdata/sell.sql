UPDATE item SET token = :token WHERE id = '7' AND token < :token RETURNING stock \gset
UPDATE item SET stock = :stock - 1 WHERE id = '7' AND token = :token AND :stock > 0 RETURNING stock \gset
