// SPDX-License-Identifier: Apache-2.0

// Follows a destination with canal-go and prints each entry as a line of JSON, up to a row of a table "stop".
package main

import (
	"bufio"
	"encoding/json"
	"log"
	"os"
	"strconv"
	"time"

	"github.com/withlin/canal-go/client"
	pbe "github.com/withlin/canal-go/protocol/entry"
	"google.golang.org/protobuf/proto"
)

type column struct {
	Value   *string `json:"value"`
	SQLType int32   `json:"sqlType"`
	Type    string  `json:"mysqlType"`
	Key     bool    `json:"isKey"`
	Updated bool    `json:"updated"`
}

type row struct {
	Before map[string]column `json:"before"`
	After  map[string]column `json:"after"`
}

type told struct {
	Entry  string `json:"entry"`
	Event  string `json:"event"`
	Schema string `json:"schema"`
	Table  string `json:"table"`
	SQL    string `json:"sql"`
	Rows   []row  `json:"rows"`
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func columns(from []*pbe.Column) map[string]column {
	found := map[string]column{}
	for _, one := range from {
		read := column{SQLType: one.GetSqlType(), Type: one.GetMysqlType(), Key: one.GetIsKey(), Updated: one.GetUpdated()}
		if !one.GetIsNull() {
			value := one.GetValue()
			read.Value = &value
		}
		found[one.GetName()] = read
	}
	return found
}

func tell(entry *pbe.Entry) told {
	found := told{
		Entry:  entry.GetEntryType().String(),
		Schema: entry.GetHeader().GetSchemaName(),
		Table:  entry.GetHeader().GetTableName(),
		Rows:   []row{},
	}
	if entry.GetEntryType() == pbe.EntryType_ROWDATA {
		change := new(pbe.RowChange)
		must(proto.Unmarshal(entry.GetStoreValue(), change))
		found.Event, found.SQL = change.GetEventType().String(), change.GetSql()
		for _, one := range change.GetRowDatas() {
			found.Rows = append(found.Rows, row{columns(one.GetBeforeColumns()), columns(one.GetAfterColumns())})
		}
	}
	return found
}

func main() {
	port, err := strconv.Atoi(os.Args[1])
	must(err)
	connector := client.NewSimpleCanalConnector("127.0.0.1", port, os.Args[3], os.Args[4], os.Args[2], 60000, 60*60*1000)
	must(connector.Connect())
	must(connector.Subscribe(os.Args[5]))
	output := bufio.NewWriter(os.Stdout)
	encoder := json.NewEncoder(output)
	encoder.SetEscapeHTML(false)
	for stop := false; !stop; {
		message, err := connector.GetWithOutAck(100, nil, nil)
		must(err)
		if message.Id == -1 || len(message.Entries) == 0 {
			time.Sleep(10 * time.Millisecond)
			continue
		}
		for i := range message.Entries {
			found := tell(&message.Entries[i])
			must(encoder.Encode(found))
			stop = stop || (found.Table == "stop" && len(found.Rows) > 0)
		}
		must(connector.Ack(message.Id))
	}
	must(output.Flush())
	must(connector.DisConnection())
}
