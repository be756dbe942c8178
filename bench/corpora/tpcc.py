# SPDX-License-Identifier: Apache-2.0
"""A write-only mix like TPC-C: 45 % new orders, 43 % payments, 4 % deliveries, 8 % restocking.

A transaction has about eighteen rows over nine tables, most of them in small events of one or two rows. This
is the load of a typical order system. Each of the two sessions owns four warehouses.
"""

from .workload import DATABASE, NUMBERS, Workload

WAREHOUSES = 8
ITEMS = 10_000
CUSTOMERS = 300

_ADDRESS = """street_1 VARCHAR(20), street_2 VARCHAR(20), city VARCHAR(20), state CHAR(2), zip CHAR(9)"""

_TABLES = {
    "warehouse": f"""w_id SMALLINT PRIMARY KEY, name VARCHAR(10), {_ADDRESS},
        tax DECIMAL(4,4), ytd DECIMAL(12,2)""",
    "district": f"""w_id SMALLINT, d_id TINYINT, name VARCHAR(10), {_ADDRESS},
        tax DECIMAL(4,4), ytd DECIMAL(12,2), next_o_id INT, PRIMARY KEY (w_id, d_id)""",
    "customer": f"""w_id SMALLINT, d_id TINYINT, c_id INT, first_name VARCHAR(16), middle CHAR(2),
        last_name VARCHAR(16), {_ADDRESS}, phone CHAR(16), since DATETIME, credit CHAR(2),
        credit_limit BIGINT, discount DECIMAL(4,2), balance DECIMAL(12,2), ytd_payment DECIMAL(12,2),
        payment_count SMALLINT, delivery_count SMALLINT, notes TEXT,
        PRIMARY KEY (w_id, d_id, c_id)""",
    "history": """c_w_id SMALLINT, c_d_id TINYINT, c_id INT, w_id SMALLINT, d_id TINYINT, paid_at DATETIME,
        amount DECIMAL(6,2), notes VARCHAR(24)""",
    "orders": """w_id SMALLINT, d_id TINYINT, o_id INT, c_id INT, entered_at DATETIME, carrier_id TINYINT,
        line_count TINYINT, all_local TINYINT, PRIMARY KEY (w_id, d_id, o_id)""",
    "new_order": "w_id SMALLINT, d_id TINYINT, o_id INT, PRIMARY KEY (w_id, d_id, o_id)",
    "order_line": """w_id SMALLINT, d_id TINYINT, o_id INT, number TINYINT, i_id INT, supply_w_id SMALLINT,
        delivered_at DATETIME, quantity TINYINT, amount DECIMAL(6,2), dist_text CHAR(24),
        PRIMARY KEY (w_id, d_id, o_id, number)""",
    "stock": f"""w_id SMALLINT, i_id INT, quantity SMALLINT,
        {", ".join(f"dist_{n:02} CHAR(24)" for n in range(1, 11))},
        ytd DECIMAL(8,0), order_count SMALLINT, remote_count SMALLINT, notes VARCHAR(50),
        PRIMARY KEY (w_id, i_id)""",
}

_STREET = (
    "LEFT(SHA2(RAND(), 224), 15), LEFT(SHA2(RAND(), 224), 15), LEFT(SHA2(RAND(), 224), 12), 'CA', '123456789'"
)
_DISTRICTS = f"{DATABASE}.district"

_SEEDS = (
    f"""INSERT INTO {DATABASE}.warehouse SELECT number, CONCAT('house', number), {_STREET}, 0.1, 300000
        FROM {NUMBERS.format(count=WAREHOUSES)}""",
    f"""INSERT INTO {_DISTRICTS} SELECT w_id, number, CONCAT('dist', number), {_STREET}, 0.1, 30000, 1
        FROM (SELECT w_id FROM {DATABASE}.warehouse) AS houses JOIN {NUMBERS.format(count=10)}""",
    f"""INSERT INTO {DATABASE}.customer SELECT w_id, d_id, number, LEFT(SHA2(RAND(), 224), 12), 'OE',
        LEFT(SHA2(RAND(), 224), 12), {_STREET}, '0123456789012345', '2020-01-01', 'GC', 50000, 0.1,
        -10, 10, 1, 0,
        CONCAT(SHA2(RAND(), 512), SHA2(RAND(), 512), SHA2(RAND(), 512))
        FROM (SELECT w_id, d_id FROM {_DISTRICTS}) AS districts JOIN {NUMBERS.format(count=CUSTOMERS)}""",
    f"""INSERT INTO {DATABASE}.stock SELECT w_id, number, 50,
        {", ".join(["LEFT(SHA2(RAND(), 224), 24)"] * 10)}, 0, 0, 0, LEFT(SHA2(RAND(), 224), 40)
        FROM (SELECT w_id FROM {DATABASE}.warehouse) AS houses JOIN {NUMBERS.format(count=ITEMS)}""",
)

_NEW_ORDER = f"""
CREATE PROCEDURE {DATABASE}.new_order_enter (IN w INT, IN d INT, IN c INT)
BEGIN
  DECLARE o, line, item INT DEFAULT 0;
  DECLARE line_count INT DEFAULT 5 + FLOOR(RAND() * 11);
  START TRANSACTION;
  SELECT next_o_id INTO o FROM {DATABASE}.district WHERE w_id = w AND d_id = d FOR UPDATE;
  UPDATE {DATABASE}.district SET next_o_id = o + 1 WHERE w_id = w AND d_id = d;
  INSERT INTO {DATABASE}.orders VALUES (w, d, o, c, NOW(), NULL, line_count, 1);
  INSERT INTO {DATABASE}.new_order VALUES (w, d, o);
  WHILE line < line_count DO
    SET line = line + 1;
    SET item = 1 + FLOOR(RAND() * {ITEMS});
    UPDATE {DATABASE}.stock SET quantity = IF(quantity > 10, quantity - 5, quantity + 86),
      ytd = (ytd + 5) % 90000000, order_count = (order_count + 1) % 30000 WHERE w_id = w AND i_id = item;
    INSERT INTO {DATABASE}.order_line VALUES
      (w, d, o, line, item, w, NULL, 5, FLOOR(RAND() * 99999) / 100, LEFT(SHA2(RAND(), 224), 24));
  END WHILE;
  COMMIT;
END
"""

_PAYMENT = f"""
CREATE PROCEDURE {DATABASE}.payment_take (IN w INT, IN d INT, IN c INT)
BEGIN
  START TRANSACTION;
  UPDATE {DATABASE}.warehouse SET ytd = ytd + 10 WHERE w_id = w;
  UPDATE {DATABASE}.district SET ytd = ytd + 10 WHERE w_id = w AND d_id = d;
  UPDATE {DATABASE}.customer SET balance = balance - 10, ytd_payment = ytd_payment + 10,
    payment_count = (payment_count + 1) % 30000 WHERE w_id = w AND d_id = d AND c_id = c;
  INSERT INTO {DATABASE}.history VALUES (w, d, c, w, d, NOW(), 10, LEFT(SHA2(RAND(), 224), 20));
  COMMIT;
END
"""

_DELIVERY = f"""
CREATE PROCEDURE {DATABASE}.delivery_send (IN w INT)
BEGIN
  DECLARE d, o, c INT DEFAULT 0;
  START TRANSACTION;
  WHILE d < 10 DO
    SET d = d + 1;
    SET o = (SELECT MIN(n.o_id) FROM {DATABASE}.new_order AS n WHERE n.w_id = w AND n.d_id = d);
    IF o IS NOT NULL THEN
      SET c = (SELECT s.c_id FROM {DATABASE}.orders AS s WHERE s.w_id = w AND s.d_id = d AND s.o_id = o);
      DELETE FROM {DATABASE}.new_order WHERE w_id = w AND d_id = d AND o_id = o;
      UPDATE {DATABASE}.orders SET carrier_id = 3 WHERE w_id = w AND d_id = d AND o_id = o;
      UPDATE {DATABASE}.order_line SET delivered_at = NOW() WHERE w_id = w AND d_id = d AND o_id = o;
      UPDATE {DATABASE}.customer SET balance = balance + 50, delivery_count = (delivery_count + 1) % 30000
        WHERE w_id = w AND d_id = d AND c_id = c;
    END IF;
  END WHILE;
  COMMIT;
END
"""

_FILL = f"""
CREATE PROCEDURE {DATABASE}.tpcc_fill_{{session}} (IN transactions INT)
BEGIN
  DECLARE done INT DEFAULT 0;
  DECLARE w, d, c INT;
  DECLARE choice DOUBLE;
  WHILE done < transactions DO
    SET w = {{first}} + FLOOR(RAND() * {WAREHOUSES // 2});
    SET d = 1 + FLOOR(RAND() * 10);
    SET c = 1 + FLOOR(RAND() * {CUSTOMERS});
    SET choice = RAND();
    IF choice < 0.45 THEN CALL {DATABASE}.new_order_enter(w, d, c);
    ELSEIF choice < 0.88 THEN CALL {DATABASE}.payment_take(w, d, c);
    ELSEIF choice < 0.92 THEN CALL {DATABASE}.delivery_send(w);
    ELSE UPDATE {DATABASE}.stock SET quantity = 10 + (quantity + 7) % 90
      WHERE w_id = w AND i_id BETWEEN c AND c + 5;
    END IF;
    SET done = done + 1;
  END WHILE;
END
"""

WORKLOAD = Workload(
    name="tpcc",
    tables=tuple(_TABLES),
    seed=(
        *(f"CREATE TABLE {DATABASE}.{name} ({columns}) ENGINE=InnoDB" for name, columns in _TABLES.items()),
        *_SEEDS,
        _NEW_ORDER,
        _PAYMENT,
        _DELIVERY,
        *(_FILL.format(session=session, first=1 + session * WAREHOUSES // 2) for session in range(2)),
    ),
    sessions=((), ()),
    fill=("tpcc_fill_0", "tpcc_fill_1"),
    step=100,
)
