-- SPDX-License-Identifier: Apache-2.0
-- What Canal stops at, in whatever table.

CREATE DATABASE vectors;
USE vectors;
CREATE TABLE vectors (id int PRIMARY KEY, v vector(3), w vector);
INSERT INTO vectors VALUES (1, string_to_vector('[1, -2.5, 1e10]'), string_to_vector('[0.1]')), (2, NULL, NULL);

-- Compressed transactions.
SET SESSION binlog_transaction_compression = ON;
CREATE TABLE compressed (id int PRIMARY KEY, v varchar(2000));
BEGIN;
INSERT INTO compressed VALUES (1, repeat('a', 2000)), (2, repeat('b', 2000));
UPDATE compressed SET v = repeat('c', 2000) WHERE id = 1;
UPDATE compressed SET id = 3 WHERE id = 2;
COMMIT;
DELETE FROM compressed;
SET SESSION binlog_transaction_compression = OFF;
