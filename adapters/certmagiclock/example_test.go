package certmagiclock_test

import (
	"log"
	"net/http"

	"github.com/caddyserver/certmagic"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/adapters/certmagiclock"
)

func Example() {
	rdb := redis.NewClient(&redis.Options{Addr: "localhost:6379", ContextTimeoutEnabled: true})
	defer rdb.Close()
	client, err := leased.New(rdb, leased.WithKeyPrefix("certmagic:"))
	if err != nil {
		log.Panic(err)
	}
	defer client.Close()

	storage := &certmagic.FileStorage{Path: "/mnt/shared/certificates"} // or any other
	certmagic.Default.Storage = certmagiclock.New(storage, client)
	log.Println(certmagic.HTTPS([]string{"example.com"}, http.NotFoundHandler()))
}
