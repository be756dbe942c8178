// SPDX-License-Identifier: Apache-2.0

// A TiDB cluster's storage in one process: PD and etcd on one port, and TiKV on another.
//
// etcd is the embedded one that PD runs too. PD's calls are answered from unistore, TiDB's own storage for tests, which
// also serves TiKV's calls. It prints "ready" once it can be used, and ends with its standard input.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"sync"

	"github.com/pingcap/kvproto/pkg/metapb"
	"github.com/pingcap/kvproto/pkg/pdpb"
	"github.com/pingcap/kvproto/pkg/tikvpb"
	"github.com/pingcap/tidb/store/mockstore/unistore/config"
	"github.com/pingcap/tidb/store/mockstore/unistore/server"
	"github.com/pingcap/tidb/store/mockstore/unistore/tikv"
	"go.etcd.io/etcd/server/v3/embed"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
)

const clusterID = 7001

// placement answers for PD.
type placement struct {
	pdpb.UnimplementedPDServer
	regions *tikv.MockRegionManager
	ids     *tikv.MockPD
	address string
	lock    sync.Mutex
}

func header() *pdpb.ResponseHeader { return &pdpb.ResponseHeader{ClusterId: clusterID} }

func (p *placement) GetMembers(context.Context, *pdpb.GetMembersRequest) (*pdpb.GetMembersResponse, error) {
	self := &pdpb.Member{Name: "pd", MemberId: 1, ClientUrls: []string{p.address}, PeerUrls: []string{p.address}}
	return &pdpb.GetMembersResponse{Header: header(), Leader: self, EtcdLeader: self, Members: []*pdpb.Member{self}}, nil
}

// Tso answers with the last of as many consecutive timestamps as were asked for.
func (p *placement) Tso(stream pdpb.PD_TsoServer) error {
	for {
		request, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		physical, logical := p.timestamps(int64(request.Count))
		last := &pdpb.Timestamp{Physical: physical, Logical: logical}
		if err := stream.Send(&pdpb.TsoResponse{Header: header(), Count: request.Count, Timestamp: last}); err != nil {
			return err
		}
	}
}

func (p *placement) timestamps(count int64) (physical, logical int64) {
	p.lock.Lock()
	defer p.lock.Unlock()
	physical, logical = tikv.GetTS()
	for run := int64(1); run < count; {
		next, following := tikv.GetTS()
		if next == physical && following == logical+1 {
			run++
		} else {
			run = 1
		}
		physical, logical = next, following
	}
	return physical, logical
}

func (p *placement) IsBootstrapped(context.Context, *pdpb.IsBootstrappedRequest) (*pdpb.IsBootstrappedResponse, error) {
	return &pdpb.IsBootstrappedResponse{Header: header(), Bootstrapped: true}, nil
}

func (p *placement) AllocID(ctx context.Context, _ *pdpb.AllocIDRequest) (*pdpb.AllocIDResponse, error) {
	id, err := p.ids.AllocID(ctx)
	return &pdpb.AllocIDResponse{Header: header(), Id: id}, err
}

func (p *placement) GetStore(ctx context.Context, r *pdpb.GetStoreRequest) (*pdpb.GetStoreResponse, error) {
	store, err := p.ids.GetStore(ctx, r.StoreId)
	return &pdpb.GetStoreResponse{Header: header(), Store: store}, err
}

func (p *placement) GetAllStores(context.Context, *pdpb.GetAllStoresRequest) (*pdpb.GetAllStoresResponse, error) {
	return &pdpb.GetAllStoresResponse{Header: header(), Stores: p.regions.GetAllStores()}, nil
}

func (p *placement) GetRegion(ctx context.Context, r *pdpb.GetRegionRequest) (*pdpb.GetRegionResponse, error) {
	region, err := p.ids.GetRegion(ctx, r.RegionKey)
	if err != nil || region == nil {
		return nil, err
	}
	return &pdpb.GetRegionResponse{Header: header(), Region: region.Meta, Leader: region.Leader}, nil
}

func (p *placement) GetPrevRegion(ctx context.Context, r *pdpb.GetRegionRequest) (*pdpb.GetRegionResponse, error) {
	return p.GetRegion(ctx, r)
}

func (p *placement) GetRegionByID(ctx context.Context, r *pdpb.GetRegionByIDRequest) (*pdpb.GetRegionResponse, error) {
	region, err := p.ids.GetRegionByID(ctx, r.RegionId)
	if err != nil || region == nil {
		return nil, err
	}
	return &pdpb.GetRegionResponse{Header: header(), Region: region.Meta, Leader: region.Leader}, nil
}

func (p *placement) ScanRegions(_ context.Context, r *pdpb.ScanRegionsRequest) (*pdpb.ScanRegionsResponse, error) {
	response := &pdpb.ScanRegionsResponse{Header: header()}
	for _, region := range p.regions.ScanRegions(r.StartKey, r.EndKey, int(r.Limit)) {
		response.RegionMetas = append(response.RegionMetas, region.Meta)
		response.Leaders = append(response.Leaders, region.Leader)
		response.Regions = append(response.Regions, &pdpb.Region{Region: region.Meta, Leader: region.Leader})
	}
	return response, nil
}

func (p *placement) ScatterRegion(context.Context, *pdpb.ScatterRegionRequest) (*pdpb.ScatterRegionResponse, error) {
	return &pdpb.ScatterRegionResponse{Header: header(), FinishedPercentage: 100}, nil
}

func (p *placement) GetOperator(context.Context, *pdpb.GetOperatorRequest) (*pdpb.GetOperatorResponse, error) {
	return &pdpb.GetOperatorResponse{Header: header(), Status: pdpb.OperatorStatus_SUCCESS}, nil
}

func (p *placement) GetGCSafePoint(context.Context, *pdpb.GetGCSafePointRequest) (*pdpb.GetGCSafePointResponse, error) {
	return &pdpb.GetGCSafePointResponse{Header: header()}, nil
}

func (p *placement) UpdateGCSafePoint(
	_ context.Context, r *pdpb.UpdateGCSafePointRequest,
) (*pdpb.UpdateGCSafePointResponse, error) {
	return &pdpb.UpdateGCSafePointResponse{Header: header(), NewSafePoint: r.SafePoint}, nil
}

func (p *placement) UpdateServiceGCSafePoint(
	_ context.Context, r *pdpb.UpdateServiceGCSafePointRequest,
) (*pdpb.UpdateServiceGCSafePointResponse, error) {
	return &pdpb.UpdateServiceGCSafePointResponse{
		Header: header(), ServiceId: r.ServiceId, TTL: r.TTL, MinSafePoint: r.SafePoint,
	}, nil
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// serveStorage serves TiKV's calls from memory and returns what PD knows of it.
func serveStorage(folder, address string) (*tikv.MockRegionManager, *tikv.MockPD) {
	settings := config.DefaultConf
	settings.Engine.DBPath = filepath.Join(folder, "kv")
	settings.Engine.VolatileMode = true
	settings.Engine.ValueThreshold = 0
	settings.Engine.MaxMemTableSize = 12 << 20
	settings.Engine.NumCompactors = 1
	settings.Engine.SyncWrite = false
	settings.Server.Raft = false
	settings.Server.StoreAddr = address
	check(os.MkdirAll(settings.Engine.DBPath, 0o755))
	storage, regions, ids, err := server.NewMock(&settings, clusterID)
	check(err)
	store, region, peer := regions.AllocID(), regions.AllocID(), regions.AllocID()
	check(regions.Bootstrap([]*metapb.Store{{Id: store, Address: address}}, &metapb.Region{
		Id:          region,
		RegionEpoch: &metapb.RegionEpoch{ConfVer: 1, Version: 1},
		Peers:       []*metapb.Peer{{Id: peer, StoreId: store}},
	}))
	listener, err := net.Listen("tcp", address)
	check(err)
	service := grpc.NewServer(grpc.MaxRecvMsgSize(1<<30), grpc.MaxSendMsgSize(1<<30))
	tikvpb.RegisterTikvServer(service, storage)
	// Without health checks, TiDB's client takes a store for unreachable after its first slow answer.
	grpc_health_v1.RegisterHealthServer(service, health.NewServer())
	go func() { check(service.Serve(listener)) }()
	return regions, ids
}

func main() {
	folder := flag.String("folder", "", "a folder of its own")
	pd := flag.String("pd", "127.0.0.1:2379", "host:port of PD and etcd")
	peer := flag.String("peer", "127.0.0.1:2380", "host:port that etcd needs for other members")
	kv := flag.String("kv", "127.0.0.1:20160", "host:port of TiKV")
	flag.Parse()
	regions, ids := serveStorage(*folder, *kv)
	client, err := url.Parse("http://" + *pd)
	check(err)
	others, err := url.Parse("http://" + *peer)
	check(err)
	settings := embed.NewConfig()
	settings.Dir = filepath.Join(*folder, "etcd")
	settings.LogLevel = "error"
	settings.LCUrls, settings.ACUrls = []url.URL{*client}, []url.URL{*client}
	settings.LPUrls, settings.APUrls = []url.URL{*others}, []url.URL{*others}
	settings.InitialCluster = settings.InitialClusterFromName(settings.Name)
	settings.UnsafeNoFsync = true
	answers := &placement{regions: regions, ids: ids, address: client.String()}
	settings.ServiceRegister = func(service *grpc.Server) { pdpb.RegisterPDServer(service, answers) }
	etcd, err := embed.StartEtcd(settings)
	check(err)
	<-etcd.Server.ReadyNotify()
	fmt.Println("ready")
	_, _ = io.Copy(io.Discard, os.Stdin)
	etcd.Close()
}
