// SPDX-License-Identifier: Apache-2.0

// A TiDB server with its binlog enabled: TiDB's own packages, put together as its server does.
//
// It prints "ready" once it accepts connections.
package main

import (
	"flag"
	"fmt"
	"log"
	"time"

	"github.com/pingcap/tidb/config"
	"github.com/pingcap/tidb/extension"
	_ "github.com/pingcap/tidb/planner/core"
	"github.com/pingcap/tidb/server"
	"github.com/pingcap/tidb/session"
	"github.com/pingcap/tidb/sessionctx/binloginfo"
	"github.com/pingcap/tidb/store"
	"github.com/pingcap/tidb/store/driver"
	pumpclient "github.com/pingcap/tidb/tidb-binlog/pump_client"
	"github.com/pingcap/tidb/util/logutil"
	pd "github.com/tikv/pd/client"
)

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	address := flag.String("pd", "127.0.0.1:2379", "host:port of PD")
	port := flag.Uint("port", 4000, "MySQL's protocol")
	status := flag.Uint("status", 10080, "HTTP")
	strategy := flag.String("strategy", pumpclient.Range, "range or hash")
	folder := flag.String("folder", "", "a folder of its own")
	timeout := flag.Duration("timeout", 15*time.Second, "binlog.write-timeout")
	flag.Parse()

	settings := config.NewConfig()
	settings.Store, settings.Path = "tikv", *address
	settings.Host, settings.AdvertiseAddress, settings.Port = "127.0.0.1", "127.0.0.1", *port
	settings.Status.StatusHost, settings.Status.StatusPort = "127.0.0.1", *status
	settings.Status.ReportStatus = true
	settings.Socket = ""
	settings.TempDir = *folder
	settings.Log.Level = "warn"
	settings.Binlog.Enable, settings.Binlog.Strategy = true, *strategy
	config.StoreGlobalConfig(settings)
	check(logutil.InitLogger(settings.Log.ToLogConfig()))
	check(extension.Setup())
	check(store.Register("tikv", driver.TiKVDriver{}))

	pumps, err := pumpclient.NewPumpsClient(*address, *strategy, *timeout, pd.SecurityOption{})
	check(err)
	binloginfo.SetPumpsClient(pumps)
	session.SetSchemaLease(time.Second)
	session.SetStatsLease(0)
	session.DisableStats4Test()
	storage, err := store.New("tikv://" + *address)
	check(err)
	domain, err := session.BootstrapSession(storage)
	check(err)
	service, err := server.NewServer(settings, server.NewTiDBDriver(storage))
	check(err)
	service.SetDomain(domain)
	service.InitGlobalConnID(domain.ServerID)
	domain.InfoSyncer().SetSessionManager(service)
	fmt.Println("ready")
	check(service.Run())
}
