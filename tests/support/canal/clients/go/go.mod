module penstock/canalclient

go 1.21

require github.com/withlin/canal-go v1.1.2

require (
	github.com/go-zookeeper/zk v1.0.3 // indirect
	google.golang.org/protobuf v1.33.0 // indirect
)
