// SPDX-License-Identifier: Apache-2.0

// A writer that is nothing but TiDB's own pump client: many goroutines, each with its transactions one after the other.
//
// It prints a JSON object for each transaction, {"start_ts", "commit_ts"} with 0 for a rollback, and at the end
// {"writes", "seconds", "p50_ms", "p99_ms", "max_ms"} of the acknowledged calls.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"log"
	"os"
	"slices"
	"sync"
	"time"

	pumpclient "github.com/pingcap/tidb/tidb-binlog/pump_client"
	"github.com/pingcap/tipb/go-binlog"
	pd "github.com/tikv/pd/client"
)

type outcome struct {
	StartTS  int64 `json:"start_ts"`
	CommitTS int64 `json:"commit_ts"`
}

type summary struct {
	Writes  int     `json:"writes"`
	Seconds float64 `json:"seconds"`
	P50     float64 `json:"p50_ms"`
	P99     float64 `json:"p99_ms"`
	Max     float64 `json:"max_ms"`
}

type writer struct {
	client  *pumpclient.PumpsClient
	pd      pd.Client
	rows    []byte
	took    []time.Duration
	results *json.Encoder
	lock    *sync.Mutex
}

func (w *writer) timestamp() int64 {
	physical, logical, err := w.pd.GetTS(context.Background())
	check(err)
	return physical<<18 | logical
}

func (w *writer) write(record *binlog.Binlog) {
	begun := time.Now()
	check(w.client.WriteBinlog(record))
	w.took = append(w.took, time.Since(begun))
}

// transaction writes a prewrite, and draws the commit timestamp once that is acknowledged, as TiDB does.
func (w *writer) transaction(rollback bool) {
	start := w.timestamp()
	key := []byte("t\x80writer")
	w.write(&binlog.Binlog{Tp: binlog.BinlogType_Prewrite, StartTs: start, PrewriteKey: key, PrewriteValue: w.rows})
	end := &binlog.Binlog{Tp: binlog.BinlogType_Rollback, StartTs: start, PrewriteKey: key}
	if !rollback {
		end.Tp, end.CommitTs = binlog.BinlogType_Commit, w.timestamp()
	}
	w.write(end)
	w.lock.Lock()
	defer w.lock.Unlock()
	check(w.results.Encode(outcome{start, end.CommitTs}))
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	address := flag.String("pd", "127.0.0.1:2379", "PD")
	strategy := flag.String("strategy", pumpclient.Range, "range, hash, score or local-unix")
	socket := flag.String("socket", "", "the Pump's socket for local-unix")
	writers := flag.Int("writers", 32, "goroutines")
	transactions := flag.Int("transactions", 100, "transactions of each")
	size := flag.Int("bytes", 200, "bytes of rows in a transaction")
	timeout := flag.Duration("timeout", 15*time.Second, "TiDB's binlog.write-timeout")
	flag.Parse()
	var client *pumpclient.PumpsClient
	var err error
	if *socket == "" {
		client, err = pumpclient.NewPumpsClient(*address, *strategy, *timeout, pd.SecurityOption{})
	} else {
		client, err = pumpclient.NewLocalPumpsClient(*address, *socket, *timeout, pd.SecurityOption{})
	}
	check(err)
	timestamps, err := pd.NewClient([]string{*address}, pd.SecurityOption{})
	check(err)
	results, lock := json.NewEncoder(os.Stdout), &sync.Mutex{}
	all := make([]*writer, *writers)
	var running sync.WaitGroup
	begun := time.Now()
	for i := range all {
		w := &writer{client: client, pd: timestamps, rows: bytes.Repeat([]byte{'x'}, *size), results: results, lock: lock}
		all[i] = w
		running.Add(1)
		go func() {
			defer running.Done()
			for n := 0; n < *transactions; n++ {
				w.transaction(n%10 == 9)
			}
		}()
	}
	running.Wait()
	seconds := time.Since(begun).Seconds()
	var took []time.Duration
	for _, w := range all {
		took = append(took, w.took...)
	}
	slices.Sort(took)
	milliseconds := func(part float64) float64 {
		return took[int(part*float64(len(took)-1))].Seconds() * 1000
	}
	check(results.Encode(summary{len(took), seconds, milliseconds(0.5), milliseconds(0.99), milliseconds(1)}))
}
