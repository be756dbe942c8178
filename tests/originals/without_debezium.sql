-- SPDX-License-Identifier: Apache-2.0
-- What Debezium stops at, in whatever table: days that no calendar has, and images in part.

CREATE DATABASE beyond;
USE beyond;
SET NAMES utf8mb4;
SET time_zone = '+00:00';
SET sql_mode = 'ALLOW_INVALID_DATES';
CREATE TABLE no_days (id int PRIMARY KEY, d date, dn date NOT NULL, dt datetime, dn6 datetime(6) NOT NULL);
INSERT INTO no_days VALUES (7, '2021-02-31', '2021-02-31', '2021-02-30 01:02:03', '2021-04-31 00:00:00.5');
SET sql_mode = 'NO_ENGINE_SUBSTITUTION,NO_AUTO_VALUE_ON_ZERO';
CREATE TABLE parts (id int PRIMARY KEY, a int, b varchar(20), c text);
CREATE TABLE parts_no_key (a int, b varchar(20));
SET SESSION binlog_row_image = MINIMAL;
INSERT INTO parts VALUES (1, 1, 'x', 'y'), (2, NULL, NULL, NULL);
INSERT INTO parts (id, a) VALUES (3, 3);
UPDATE parts SET a = 5 WHERE id = 1;
UPDATE parts SET b = NULL, c = 'z' WHERE id IN (1, 2);
UPDATE parts SET id = 10 WHERE id = 1;
DELETE FROM parts WHERE id = 2;
INSERT INTO parts_no_key VALUES (1, 'x');
UPDATE parts_no_key SET a = 2;
DELETE FROM parts_no_key;
SET SESSION binlog_row_image = NOBLOB;
INSERT INTO parts VALUES (20, 1, 'x', 'blob');
UPDATE parts SET a = 2 WHERE id = 20;
UPDATE parts SET c = 'new' WHERE id = 20;
DELETE FROM parts WHERE id = 20;
SET SESSION binlog_row_image = FULL;
DROP DATABASE beyond;
