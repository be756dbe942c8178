{{- define "penstock.name" -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* The port of an address such as 0.0.0.0:7070. */}}
{{- define "penstock.port" -}}
{{- regexFind "[0-9]+$" . -}}
{{- end -}}

{{- define "penstock.scheme" -}}
{{- if dig "listen" "tls" "cert" "" .Values.settings -}}HTTPS{{- else -}}HTTP{{- end -}}
{{- end -}}

{{/* The ports of every listener in the settings, by name. */}}
{{- define "penstock.ports" -}}
{{- range $name, $setting := dict "http" "http" "canal" "canal" "ptubes" "ptubes" "ptubes-monitor" "ptubes_monitor" -}}
{{- with dig "listen" $setting "" $.Values.settings }}
{{ $name }}: {{ include "penstock.port" . }}
{{- end -}}
{{- end -}}
{{- end -}}
