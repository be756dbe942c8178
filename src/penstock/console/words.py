# SPDX-License-Identifier: Apache-2.0
"""The words of the pages: English in the templates, and their Chinese translations."""

# The first language is the default.
LANGUAGES = ("en", "zh")

CHINESE = {
    "(not logged)": "（未记录）",
    "A part of the log cannot be read": "日志的一部分无法读取",
    "Account": "账号",
    "After": "变更后",
    "Alert": "告警",
    "Alerts": "告警",
    "All {count} pipelines": "全部 {count} 个管道",
    "At most": "最多",
    "Before": "变更前",
    "Behind": "落后",
    "Checkpoint": "检查点",
    "Column": "列",
    "Confirmed by all {count} readers that hold the log": "持有日志的全部 {count} 个读者均已确认",
    "Daemon": "守护进程",
    "Disk": "磁盘",
    "Durable": "已落盘",
    "End of the list.": "列表结束。",
    "Enter the token of an account of penstock.yaml.": "请输入 penstock.yaml 中某个账号的令牌。",
    "Epoch": "纪元",
    "Expires": "到期",
    "File": "文件",
    "Filter": "筛选",
    "From": "起",
    "Holds": "保留点",
    "Instance": "实例",
    "Instances": "实例",
    "It emptied the table: the row is gone, if it was there.": "该语句清空了表：如果此行存在，它已被删除。",
    "It may run again, from its recorded position. A process has to run it: penstock run.": (
        "它可以从记录的位点继续运行，但需要有进程来运行它：penstock run。"
    ),
    "It stops after its current batch, with all of its sinks, and does not start before it is resumed. Its"
    " target falls behind; its sources have to keep their logs.": (
        "它会在当前批次完成后连同所有目标一起停止，恢复之前不会启动。目标会落后，数据源必须保留日志。"
    ),
    "Keeps": "保留",
    "Key": "键",
    "Key columns": "键列",
    "Lag": "延迟",
    "Last commit": "最后提交",
    "Last error": "最近的错误",
    "Leave it": "不做更改",
    "Live tail": "实时变更",
    "Load": "全量加载",
    "Log": "日志",
    "Log in": "登录",
    "Log out": "退出",
    "No condition of the daemons' alerts is true.": "当前没有告警条件成立。",
    "No daemon has a coordination store: set coordination in penstock.yaml to the store of your"
    " subscribers.": "没有守护进程配置协调存储：请在 penstock.yaml 的 coordination 中填写订阅者所用的存储。",
    "No daemon shows an instance to this account. Add one under instances in penstock.yaml.": (
        "此账号看不到任何实例。请在 penstock.yaml 的 instances 下添加。"
    ),
    "No pipeline is known here. Start the console with --pipelines and the state store of yours.": (
        "这里没有已知的管道。请用 --pipelines 加状态存储启动控制台。"
    ),
    "Nobody holds this log: retention alone decides what stays.": "没有读者保留此日志：仅由保留策略决定。",
    "Not confirmed by: {readers}": "尚未确认：{readers}",
    "One line for each value of a key of several columns. Stop loading the page to end the search.": (
        "多列键的每个值占一行。停止加载页面即可结束搜索。"
    ),
    "Overview": "总览",
    "Owner": "持有者",
    "Pages": "页面",
    "Pause the pipeline": "暂停管道",
    "Pause…": "暂停…",
    "Pipeline": "管道",
    "Pipelines": "管道",
    "Place": "位置",
    "Position": "位点",
    "Positions": "位点",
    "Positions of the readers; the table below has the same": "各读者的位点；下表内容相同",
    "Reader": "读者",
    "Readers": "读者数",
    "Reason": "原因",
    "Reason, for the others": "给其他人看的原因",
    "Received": "已接收",
    "Rejected rows": "被拒绝的行",
    "Remark": "备注",
    "Remove a hold": "移除保留点",
    "Remove the hold": "移除保留点",
    "Remove…": "移除…",
    "Resume the pipeline": "恢复管道",
    "Resume…": "恢复…",
    "Row history": "行历史",
    "Rows/s": "行/秒",
    "Search": "搜索",
    "Server": "服务器",
    "Shard": "分片",
    "Since": "开始于",
    "Sink": "目标",
    "Size": "大小",
    "Skip to the content": "跳到正文",
    "State": "状态",
    "State stores": "状态存储",
    "Subscriptions": "订阅",
    "Table": "表",
    "Tables in doubt": "定义存疑的表",
    "The end of the server's log is on the right. The scale is logarithmic.": (
        "右端是服务器日志的末尾，刻度为对数。"
    ),
    "The end of the received log is on the right; that of the server's is not known. The scale is"
    " logarithmic.": "右端是已接收日志的末尾，服务器日志的末尾未知，刻度为对数。",
    "The hold of {reader} keeps {size} of the log of {instance}, from {position} on.": (
        "{reader} 的保留点使 {instance} 的日志从 {position} 起的 {size} 得以保留。"
    ),
    "The kept log has no change of this row.": "保留的日志中没有此行的变更。",
    "The log": "日志文件",
    "The search ended early": "搜索提前结束",
    "There is no subscription yet: a program creates one when it starts a Subscriber.": (
        "还没有订阅：程序启动 Subscriber 时会创建。"
    ),
    "There is no such pipeline any longer.": "该管道已不存在。",
    "This did not work": "操作未成功",
    "This page cannot be refreshed. It shows the state of:": "此页面无法刷新，显示的是以下时间的状态：",
    "To": "止",
    "To receive": "待接收",
    "Token": "令牌",
    "What": "内容",
    "What happened to this row, and who has confirmed it?": "这一行发生过什么，谁已确认？",
    "What happens if this hold is removed?": "移除此保留点会怎样？",
    "What happens if this pipeline is paused or resumed?": "暂停或恢复此管道会怎样？",
    "What is wrong now?": "现在有什么问题？",
    "Where is each reader of this log, and what does the log still have?": (
        "此日志的每个读者在哪里，日志还保留着什么？"
    ),
    "Which captures and pipelines run, and how far is each behind?": "哪些捕获和管道在运行，各落后多少？",
    "Which member has which shard, and how far is each shard behind?": (
        "哪个成员持有哪个分片，各分片落后多少？"
    ),
    "Which pipelines run, how far is each target behind, and what was rejected?": (
        "哪些管道在运行，各目标落后多少，拒绝了什么？"
    ),
    "Without it, retention may remove that part, and the reader may lose its position. A reader that still"
    " runs sets its hold again.": (
        "移除后，保留策略可能删除这部分日志，读者可能丢失位点。仍在运行的读者会重新设置保留点。"
    ),
    "delete": "删除",
    "earliest": "最早",
    "insert": "插入",
    "never": "永不",
    "nobody": "无人",
    "none": "无",
    "read only": "只读",
    "received": "已接收",
    "server": "服务器",
    "silent for {span}": "已静默 {span}",
    "statement": "语句",
    "stopped": "已停止",
    "the primary key": "主键",
    "thread": "线程",
    "update": "更新",
    "Alerts that are firing: {count}": "正在触发的告警：{count}",
    "Broken holds: {count}": "已失效的保留点：{count}",
    "Members: {count}": "成员：{count}",
    "segments: {count}": "段：{count}",
    "Tables in doubt: {count}": "定义存疑的表：{count}",
    "Tables loaded: {count}": "已加载的表：{count}",
    "{daemon} checks no conditions: set alerts in penstock.yaml.": (
        "{daemon} 未检查任何条件：请在 penstock.yaml 中设置 alerts。"
    ),
    "{reader} holds nothing any longer.": "{reader} 已不再保留任何内容。",
    "full in {span} at the current rate, if retention removes nothing": "按当前速率且不清理时 {span} 后写满",
    "{size} free": "剩余 {size}",
    "{span} ago": "{span}前",
    "{span} left": "剩余 {span}",
    "Read it again…": "重新读取…",
    "Read the table again": "重新读取此表",
    "Rows, estimated": "估计行数",
    "Which tables are loading, streaming or stopped, and what takes the time?": (
        "哪些表在加载、同步或已停止，时间花在哪里？"
    ),
    "The last batch took {span}: {rows} rows, {size}.": "最近一批用时 {span}：{rows} 行，{size}。",
    "run": "读取与写入",
    "commit": "提交",
    "record": "记录位点",
    "What happens if this table is read again?": "重新读取此表会怎样？",
    "The pipeline has no tables yet: it never ran.": "管道还没有表：它从未运行。",
    "The pipeline {name} reads {table} chunk by chunk between its batches, while replication continues. A"
    " pipeline that does not run begins with it at its next start. Rows that the source no longer has are"
    " deleted from the target, if the target can be read back; a feed receives every row again.": (
        "管道 {name} 会在批次之间分块读取 {table}，复制不会中断。未运行的管道会在下次启动"
        "时读取。源端已不存在的行会从目标删除（若目标可回读）；消息类目标会再次收到每一行。"
    ),
    "There is no such table any longer.": "该表已不存在。",
    "asked": "已请求",
    "idle": "未运行",
    "gone": "已不存在",
    "streaming": "同步中",
    "What changes right now?": "此刻有哪些变更？",
    "Tables": "表",
    "Condition": "条件",
    "Changes": "变更类型",
    "all": "全部",
    "Follow": "跟踪",
    "At most 50 changes a second are shown, and the others are counted. Stop loading the page to pause. "
    "It ends after {rows} changes, or 15 minutes.": (
        "每秒最多显示 50 个变更，其余只计数。停止加载页面即可暂停。显示 {rows} 个变更或 15 分钟后结束。"
    ),
    "{count} changes are not shown: they arrived faster than 50 a second": (
        "有 {count} 个变更未显示：到达速度超过每秒 50 个"
    ),
    "The tail ended early": "跟踪提前结束",
    "every table that the account may read": "此账号可读的所有表",
    "The tail has ended; follow again for what comes from then on.": "跟踪已结束；再次跟踪可查看此后的变更。",
    # States of captures and pipelines.
    "behind": "落后",
    "closed": "已关闭",
    "connecting": "连接中",
    "failed": "失败",
    "held": "已停住",
    "loading": "加载中",
    "long batch": "批次运行较久",
    "never ran": "从未运行",
    "opening": "打开中",
    "paused": "已暂停",
    "pausing": "暂停中",
    "retrying": "重试中",
    "running": "运行中",
    "starting": "启动中",
    "waiting": "等待中",
    "waiting for changes": "等待变更",
}


def translate(language: str, text: str, **values: object) -> str:
    """Return a text of the templates in a language, with its values filled in."""
    translated = CHINESE.get(text, text) if language == "zh" else text
    return translated.format(**values) if values else translated
