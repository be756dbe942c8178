// SPDX-License-Identifier: Apache-2.0

// Reads every row of a server's binlog file with go-mysql: drain PORT FILE END SECONDS prints
// "inserts updates deletes offset". SECONDS 0 reads to the END of the file.
package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/go-mysql-org/go-mysql/mysql"
	"github.com/go-mysql-org/go-mysql/replication"
)

func number(text string) int64 {
	value, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		panic(err)
	}
	return value
}

func main() {
	file, end := os.Args[2], uint32(number(os.Args[3]))
	syncer := replication.NewBinlogSyncer(replication.BinlogSyncerConfig{
		ServerID: 4293,
		Flavor:   "mysql",
		Host:     "127.0.0.1",
		Port:     uint16(number(os.Args[1])),
		User:     "root",
	})
	streamer, err := syncer.StartSync(mysql.Position{Name: file, Pos: 4})
	if err != nil {
		panic(err)
	}
	var deadline time.Time
	if seconds := number(os.Args[4]); seconds > 0 {
		deadline = time.Now().Add(time.Duration(seconds) * time.Second)
	}
	var inserts, updates, deletes int
	var offset uint32
	for offset < end && (deadline.IsZero() || time.Now().Before(deadline)) {
		event, err := streamer.GetEvent(context.Background())
		if err != nil {
			panic(err)
		}
		if event.Header.LogPos > 0 {
			offset = event.Header.LogPos
		}
		rows, ok := event.Event.(*replication.RowsEvent)
		if !ok || string(rows.Table.Schema) != "bench" {
			if _, rotated := event.Event.(*replication.RotateEvent); rotated && offset > 4 && event.Header.LogPos > 0 {
				break
			}
			continue
		}
		switch rows.Type() {
		case replication.EnumRowsEventTypeInsert:
			inserts += len(rows.Rows)
		case replication.EnumRowsEventTypeUpdate:
			updates += len(rows.Rows) / 2
		case replication.EnumRowsEventTypeDelete:
			deletes += len(rows.Rows)
		}
	}
	fmt.Println(inserts, updates, deletes, offset)
	os.Exit(0)
}
