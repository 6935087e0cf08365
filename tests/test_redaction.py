"""Secrets go, everything else stays.

Every planted secret is put together at run time, so that no scanner finds a key in this file.
"""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.base.llms.types import (
    ChatMessage,
    CitableBlock,
    CitationBlock,
    DocumentBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from llama_index_memory_tiers import (
    EpisodicMemoryBlock,
    FactExtractionMemoryBlock,
    TieredChatStore,
    TieredMemory,
    ToolUse,
    VectorMemoryBlock,
)
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.redaction import DEFAULT_PATTERNS, Pattern, Redactor
from llama_index_memory_tiers.testing import ScriptedLLM

WORD = "hunt" + "er2"
AWS = "AKIA" + "IOSFODNN7" + "EXAMPLE"
AWS_SECRET = "wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCY" + "EXAMPLEKEY"
RANDOM = "a1B2c3D4" * 5
JWT = ".".join(("ey" + "JhbGciOiJIUzI1NiJ9", "ey" + "JzdWIiOiIxMjM0In0", "dBjftJeZ4CVP-mB92K27uhbUJU1p1r"))
PEM = (
    "-----BEGIN RSA " + "PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\nMIIEow\nIBAAKC\n-----END RSA " + "PRIVATE KEY-----"
)
SHOWN = re.compile(r"\[REDACTED:([a-z-]+):([0-9a-f]{6})\]")

TOKENS = {  # kind -> secrets
    "aws-key": [AWS, "ASIA" + "IOSFODNN7" + "EXAMPLE"],
    "google-key": ["AIza" + "Sy" + "b1_-Zc9" * 5, "GOCSPX" + "-" + RANDOM],
    "github-token": [p + "_" + RANDOM[:36] for p in ("ghp", "gho", "ghu", "ghs", "ghr", "github_pat")],
    "gitlab-token": ["glpat" + "-" + RANDOM[:20]],
    "slack-token": ["xoxb" + "-1234567890-" + RANDOM, "xapp" + "-1-A0-" + RANDOM],
    "openai-key": ["sk" + "-" + RANDOM, "sk" + "-proj-" + RANDOM + "_x"],
    "anthropic-key": ["sk" + "-ant-api03-" + RANDOM],
    "stripe-key": ["sk" + "_live_" + RANDOM, "rk" + "_test_" + RANDOM, "whsec" + "_" + RANDOM],
    "huggingface-token": ["hf" + "_" + RANDOM],
    "pypi-token": ["pypi" + "-AgEIcHlwaS5vcmc" + RANDOM],
    "npm-token": ["npm" + "_" + RANDOM[:36]],
    "jwt": [JWT],
    "private-key": [PEM, PEM.replace("\n", "\\n"), PEM.replace("RSA ", "OPENSSH ")],
    "service-token": ["gsk" + "_" + RANDOM, "hvs" + "." + RANDOM, "AGE-SECRET" + "-KEY-1" + "Q" * 58],
}

PHRASES = [  # text, secret
    (f"password={WORD}", WORD),
    (f"passwd: {WORD}", WORD),
    (f"DB_PASSWORD = '{WORD}'", WORD),
    (f'{{"password": "{WORD} and more", "user": "bob"}}', f"{WORD} and more"),
    (f'{{\\"password\\": \\"{WORD}\\"}}', WORD),
    (f"Server=db;Password={WORD};Database=x", WORD),
    ("password=a,b;c&d!", "a,b;c&d!"),
    ("password=secret", "=secret"),
    ("PGPASSWORD=letmein psql", "letmein"),
    (f"--password {WORD} --verbose", WORD),
    (f"curl -u bob:{WORD} https://example.com", WORD),
    (f"<password>{WORD}</password>", WORD),
    (f"user: bob, pass: {WORD}", WORD),
    (f"my password is {WORD}", WORD),
    (f"My password is {WORD}.", WORD),
    (f"my password is “{WORD} x”", f"{WORD}"),
    ("Our wifi password is swordfish, come in!", "swordfish"),
    ("the wifi password: bluebird", "bluebird"),
    ("the password for the cabin in the woods is bluebird", "bluebird"),
    (f"The password for the NAS at home: {WORD}", WORD),
    (f"password (for the router) is {WORD}", WORD),
    (f"please change my password to {WORD} today", WORD),
    (f"my password has been changed to {WORD}", WORD),
    (f"my password's {WORD}", WORD),
    (f"log in with password {WORD}", WORD),
    (f"{WORD} is my wifi password", WORD),
    (f"use {WORD} as the password for the NAS", WORD),
    (f"**Password:** {WORD}", WORD),
    (f"Password: `{WORD}`", WORD),
    ('The passphrase is "correct horse battery staple".', "correct horse battery staple"),
    ("my PIN is 4821", "4821"),
    (f"secret={RANDOM[:10]}", RANDOM[:10]),
    (f"token={RANDOM[:8]}&next=1", RANDOM[:8]),
    (f"api_key: {RANDOM[:16]}", RANDOM[:16]),
    (f"export OPENAI_API_KEY={RANDOM}", RANDOM),
    (f'"clientSecret": "{RANDOM[:12]}"', RANDOM[:12]),
    (f"our API key is {RANDOM[:16]}", RANDOM[:16]),
    (f"X-Api-Key: {RANDOM[:20]}", RANDOM[:20]),
    (f"Authorization: Bearer {RANDOM}", RANDOM),
    (f"Authorization: Basic {RANDOM[:12]}", RANDOM[:12]),
    (f"it answered to Bearer {RANDOM[:12]}", RANDOM[:12]),
    (f"postgresql://user:{WORD}@host/db", WORD),
    ("redis://:p%40ss@localhost:6379/0", "p%40ss"),
    ("mongodb+srv://me:p@ss@cluster.example.net", "p@ss"),
    (f"AccountName=x;AccountKey={RANDOM}==;EndpointSuffix=core.windows.net", RANDOM),
    (f"https://x.blob.core.windows.net/c?sv=1&sig={RANDOM}%3D&se=2", RANDOM),
    (f"aws_secret_access_key = {AWS_SECRET}", AWS_SECRET),
    (f"{AWS},{AWS_SECRET}", AWS_SECRET),
    (f"my aws secret is {AWS_SECRET}", AWS_SECRET),
    (f"密码是 {WORD}", WORD),
    (f"我的密码是{WORD}，别告诉别人", WORD),
    (f"我的密码 {WORD}", WORD),
    (f"密码：{WORD}", WORD),
    (f"密码: {WORD}", WORD),
    (f"wifi密码已经改成 {WORD} 了", WORD),
    (f"数据库的密码为{WORD}！", WORD),
    (f"登录口令为 {WORD}", WORD),
    ("口令为芝麻开门。", "芝麻开门"),
    ("我家的密码是天王盖地虎", "天王盖地虎"),
    ("密码：「芝麻 开门」", "芝麻 开门"),
    (f"密钥：{RANDOM[:16]}", RANDOM[:16]),
    (f"API key 是 {RANDOM[:16]}", RANDOM[:16]),
    (f"password：{WORD}", WORD),
    (f"用密码 {WORD} 登录", WORD),
    (f"password:\n{WORD}", WORD),
    (f"My password for the NAS is\r\n  {WORD}\nThanks!", WORD),
    (f"API key:\n{RANDOM[:16]}", RANDOM[:16]),
    (f"我的密码是\n{WORD}", WORD),
    (f"Mein Passwort ist {WORD}.", WORD),
    (f"Kennwort: {WORD}", WORD),
]

ENGLISH = """
The password policy changed last week.
I forgot my password again.
The token limit is 4000.
The max token count is 128000 for this model.
The secret is to rest the dough.
My key point is that we leave too late.
My password is too short.
The password is required.
The password is case-sensitive.
My password is wrong, I think.
Her password was expired.
The password is stored in a vault.
The password is in the blue notebook.
Passwords should never be reused.
Password: required
Password: at least 12 characters
Password: 8-16 characters, one digit.
Your password must be 12 characters long.
My password is 12 characters long.
The password is SHA-256 hashed before it is stored.
The password is bcrypt-hashed.
Reset your password: https://example.com/reset
Forgot password? Click here.
I gave the password to Michael.
He set the password to something memorable.
We changed the password yesterday.
She uses a password manager called 1Password.
A password manager is a good idea.
The password field is empty.
Set password=None to disable the check.
The default is password=<your password>.
Read it with password=os.environ["PGPASSWORD"].
Use password=getpass() in scripts.
It says password=${DB_PASSWORD} in the compose file.
The token is invalid.
The token has expired.
A token is roughly four characters.
token_count=512 and max_tokens=4096
Each token costs 3 cents.
Token: a unit of text.
The secret of a good soup is time.
Secret: always salt the water.
The secret to happiness is low expectations.
It is an open secret.
Victoria's Secret opened a shop downtown.
The Secret Garden is my daughter's favourite book.
Secret Santa is on the 12th.
The key is under the mat.
The key to success is patience.
My house key is on the hook.
The API key is missing.
You need an API key for that service.
The API key: see the wiki.
Access key rotation happens every 90 days.
The access token is refreshed hourly.
Public key cryptography is fun.
The private key never leaves the device.
She is the bearer of bad news.
Bearer authentication is simple.
The bearer bond was worth a fortune.
I pinned the note to the board.
Pin it to the wall, please.
My pin board is full of photos.
The pin is bent.
GPIO pin 17 is high.
We met at 10:30 at the station.
The train leaves from platform 9.
Call me at 555 0123.
My number is 0171 2345678.
The order number is BK-48213.
Invoice 2023-00417 is paid.
The flight is LH438 to Denver.
My birthday is 8 May 1990.
The version is v2.3.1.
The commit is 3f2a9c1.
See https://example.com:8080/path?user=a@b.com for details.
Write to anna.smith@example.com.
The repo is git@github.com:acme/site.git.
Clone https://github.com/acme/site.git first.
We use sk-learn-compatible estimators.
scikit-learn is a machine learning library.
The risk-averse investors sold everything.
The desk-bound work is tiring.
I love hiking in the mountains.
We adopted a dog named Biscuit.
My sister lives in Lisbon with her two kids.
Could you remind me to water the plants?
The concert was amazing, we danced all night.
I am allergic to peanuts.
Let's have dinner at seven.
The recipe needs 200 g of flour and 3 eggs.
My favourite colour is teal.
I started a new job at the hospital.
He passed the exam with 92 %.
Pass: 85 of 100 points.
Pass the salt, please.
The mountain pass is closed in winter.
My boarding pass is on my phone.
The bus pass costs 49 euros a month.
Compass: north is up.
The code word for the party is a surprise.
The passcode is wrong.
The passphrase was too long to remember.
Login: use your email.
What is my password?
Why is the password wrong?
Is the password the same as before?
The password is the same as last year.
My password is basically my weakest point.
The password and the username are on the card.
The new password works.
Which password did you use?
Keep your password secret.
Keep your token secret: never share it.
Passwords: a short history
The authentication token lives for 15 minutes.
The auth token is a JWT.
The session token is stored in a cookie.
It returns a token, then you refresh it.
We tokenise text into words.
The tokeniser is slow on Chinese.
A signing key is created on first start.
The encryption key is derived from the passphrase.
The license key is printed on the box.
Client secret rotation is described in chapter 4.
secret=True marks the field as hidden.
The keyboard has a sticky key.
Press any key to continue.
A monkey stole her sandwich.
The turnkey solution was expensive.
The data is encrypted with AES-256.
The hash is computed with SHA256.
The URL is http://localhost:8000/docs.
The ratio is 3:1.
My schedule: gym at 6, work at 9.
Note: bring a jacket.
The time is 18:45 in Tokyo.
The museum opened in 1897.
He said: trust no one.
The account is in good standing.
The account manager called twice.
Private: do not enter.
We hid the presents in the attic.
The safe is behind the painting.
My locker is number 42.
The room is 1204 on the twelfth floor.
The wifi is slow today.
The wifi password is on the fridge.
The wifi password is the same as at home.
""".strip().splitlines()

CHINESE = """
密码学很有趣。
我忘记密码了。
密码是很重要的东西。
密码是必填的。
密码不能为空。
密码至少8位。
密码是6到16位字符。
密码是2019年改的。
密码是SHA256加密的。
密码为空时会报错。
忘记密码：请点击这里。
密码：必填
密码：不能少于八位
这个密码太简单了。
你的密码是什么？
我的密码是多少来着？
密码是一门古老的学问。
他的密码是他自己设的。
请不要把密码告诉别人。
密码管理器很好用。
我们换了新的密码锁。
达芬奇密码是一本小说。
摩斯密码是用点和划表示的。
密码本放在抽屉里。
口令是必须的。
口令为空。
绕口令很难说。
口令红包抢不到。
他喊着口令跑步。
口令：请输入
密钥长度是256位。
密钥是RSA格式的。
密钥需要定期更换。
密钥管理很麻烦。
公钥和私钥是一对。
私钥不要上传。
令牌限制是4000。
令牌已经过期了。
这个令牌是一次性的。
访问令牌有效期为2小时。
token 是什么意思？
一个 token 是四个字符左右。
token 的上限是 4096。
API key 是必需的。
API key 在哪里申请？
关键是要有耐心。
秘密是把面团放一放。
这是我们之间的秘密。
钥匙在门口的垫子下面。
暗号是什么？
暗号不对。
我的生日是1990年5月8日。
我家在三楼302室。
电话是多少？
快递单号是多少？
航班是CA1234。
订单号BK-48213已发货。
今天天气很好。
我喜欢爬山和游泳。
我们周末去公园吧。
我妹妹住在上海。
他养了一只叫豆豆的狗。
我对花生过敏。
晚饭七点开始。
这家餐馆的饺子很好吃。
我换了新工作，在医院上班。
明天早上九点开会。
火车十点半出发。
她最喜欢的颜色是蓝色。
我正在学法语。
孩子们放暑假了。
音乐会非常精彩。
请提醒我浇花。
我的电脑是苹果的。
手机屏幕是6.1英寸。
这本书是2015年出版的。
版本是v2.3.1。
服务器在东京。
端口是8080。
用户名和密码都不对。
账号已经注销了。
登录需要验证码。
密码框在右边。
密码保护是默认开启的。
修改密码要两步。
改密码改成什么好呢？
新密码设成什么比较好？
密码强度为中。
密码是用来保护账户的。
密码是安全的第一道防线。
密码正确。
他猜密码猜了三次。
密码是不是太短了？
密码错误次数为3次。
银行卡密码是六位数字。
无线网密码在冰箱上。
密码和上次一样。
密码就写在便签上。
没有密码也能进。
我不记得口令了。
口令是老规矩。
""".strip().splitlines()


@pytest.mark.parametrize(("kind", "secret"), [(kind, each) for kind, all_ in TOKENS.items() for each in all_])
@pytest.mark.parametrize("frame", ["{}", "use {} for it", "令牌{}，好吗", '{{"x": "{}"}}', "a={}\nb=2", "({})."])
def test_a_known_token_is_replaced_wherever_it_stands(kind: str, secret: str, frame: str) -> None:
    redacted = Redactor().text(frame.format(secret))
    assert secret not in redacted
    found = SHOWN.search(redacted)
    assert found is not None
    assert SHOWN.sub("", redacted).strip("\n ") in {frame.format("").strip("\n "), "use  for it"}
    assert found[1] in {kind, "password", "secret"}


@pytest.mark.parametrize(("text", "secret"), PHRASES)
def test_what_a_phrase_gives_away_is_replaced(text: str, secret: str) -> None:
    redacted = Redactor().text(text)
    assert secret not in redacted.replace("REDACTED", "").replace("user:", "")
    assert SHOWN.search(redacted)
    assert Redactor().text(redacted) == redacted


def test_ordinary_sentences_stay_as_they_are() -> None:
    sentences = ENGLISH + CHINESE
    assert len(sentences) > 200
    changed = [sentence for sentence in sentences if Redactor().text(sentence) != sentence]
    assert len(changed) <= len(sentences) // 100, changed


def test_equal_secrets_have_equal_placeholders_in_every_process() -> None:
    assert Redactor().text(f"password={WORD}") == "password=[REDACTED:password:e7621f]"  # as in any other process
    assert Redactor(key=b"k").text(f"password={WORD}") == "password=[REDACTED:password:2e474d]"
    one, two = SHOWN.findall(Redactor().text(f"my password is {WORD}, so password='{WORD}'"))
    assert one == two


def test_different_secrets_and_different_keys_have_different_placeholders() -> None:
    shown = {
        Redactor(key=key).text(f"password={secret}") for key in (None, b"k", b"k" * 100) for secret in ("abc1", "abc2")
    }
    assert len(shown) == 6


def test_a_text_without_secrets_comes_back_as_the_same_object() -> None:
    text = "Nothing to see here, said the key-bearer with his token smile."
    message = ChatMessage(content=text, additional_kwargs={"name": "x", "n": [1, {"a": "b"}]})
    value = {"a": [text, 1, None], "b": (text,)}
    redactor = Redactor()
    assert redactor.text(text) is text
    assert redactor.message(message) is message
    assert redactor.value(value) is value


def _message() -> ChatMessage:
    return ChatMessage(
        role=MessageRole.ASSISTANT,
        blocks=[
            TextBlock(text=f"It is {AWS}."),
            TextBlock(text="clean"),
            ThinkingBlock(content=f"password={WORD}", additional_information={"note": f"my password is {WORD}"}),
            ToolCallBlock(tool_call_id="call_1", tool_name="login", tool_kwargs={"deep": [{"password": WORD}], "n": 3}),
            ToolCallBlock(
                tool_call_id="call_2", tool_name="login", tool_kwargs=json.dumps({"apiKey": RANDOM, "é": "密"})
            ),
            CitableBlock(title=f"token={RANDOM}", source="s", content=[TextBlock(text=f"see {JWT}")]),
            CitationBlock(title="t", source="s", cited_content=TextBlock(text=PEM), additional_location_info={"a": 1}),
            ImageBlock(url=f"https://bob:{WORD}@example.com/a.png"),
            DocumentBlock(data=f"login: password={WORD}".encode(), document_mimetype="text/plain"),
        ],
        additional_kwargs={
            "tool_call_id": "call_1",
            "tool_calls": [{"id": "call_9", "function": {"name": "f", "arguments": json.dumps({"pin": 48213})}}],
            AWS: "x",
        },
    )


def test_every_part_of_a_message_that_holds_words_is_redacted() -> None:
    message = _message()
    before = message.model_dump_json()
    redacted = Redactor().message(message)
    assert message.model_dump_json() == before
    dumped = redacted.model_dump_json()
    assert not [secret for secret in (AWS, WORD, RANDOM, JWT, "MIIEow", "48213") if secret in dumped]
    document = redacted.blocks[-1]
    assert isinstance(document, DocumentBlock)
    assert isinstance(document.data, bytes)
    assert SHOWN.search(base64.b64decode(document.data).decode())


def test_what_pairs_and_names_a_message_stays() -> None:
    message, redacted = _message(), Redactor().message(_message())
    calls = [block for block in redacted.blocks if isinstance(block, ToolCallBlock)]
    assert [(call.tool_call_id, call.tool_name) for call in calls] == [("call_1", "login"), ("call_2", "login")]
    assert redacted.additional_kwargs["tool_call_id"] == "call_1"
    assert redacted.additional_kwargs["tool_calls"][0]["id"] == "call_9"
    assert [type(block) for block in redacted.blocks] == [type(block) for block in message.blocks]
    assert isinstance(calls[1].tool_kwargs, str)
    assert json.loads(calls[1].tool_kwargs)["é"] == "密"
    assert ChatMessage.model_validate_json(redacted.model_dump_json()).blocks[0] == redacted.blocks[0]


def test_redacting_a_message_twice_is_redacting_it_once() -> None:
    once = Redactor().message(_message())
    assert Redactor().message(once) is once


@pytest.mark.parametrize(
    "value",
    [
        {"password": "abc"},
        {"db": {"PGPASSWORD": "correct"}},
        {"passwords": ["alpha", "beta"]},
        {"pin": 4821},
        {"api_key": "abcdefgh"},
        {"x-api-key": "abcdefgh"},
        {"client_secret": "abcdefgh"},
        {"access_token": "abcdefgh"},
        {"登录密码": "芝麻开门"},
        '{"outer": "{\\"password\\": \\"open sesame\\"}"}',
        [{"name": "password", "value": "abc"}],
        {"key": "client_secret", "value": "abcdefgh"},
    ],
)
def test_a_key_that_names_a_secret_makes_its_value_one(value: object) -> None:
    redacted = Redactor().value(value)
    assert redacted != value
    assert SHOWN.search(json.dumps(redacted))
    assert Redactor().value(redacted) is redacted


@pytest.mark.parametrize(
    "value",
    [
        {"max_tokens": 4096, "token_count": 12, "tokens": ["hello", "world"], "token": "ETH"},
        {"password": None, "passwd": "***", "secret": True, "api_key": "${API_KEY}"},
        {"key": "value", "id": 7, "password": ""},
        "[not json, but text]",
        "data:image/png;base64," + "passwordpin" * 100,
        {1: "a", None: "b"},
        {"name": "user", "value": "bob"},
        {"name": "password", "value": None, "type": "string"},
        "password:\n  min_length: 8\n  secretKeyRef:\n    name: db1",
        "PASSWORD=\nUSER=bob1",
        "Password:\nat least 12 characters",
        "The password is\nwritten on the fridge.",
        "Mein Passwort ist falsch.",
        "Passwort: mindestens 8 Zeichen",
    ],
)
def test_values_that_only_look_alike_stay(value: object) -> None:
    assert Redactor().value(value) is value


def test_a_secret_in_the_next_block_of_text_is_seen_and_other_blocks_stay() -> None:
    for asked in ("My password is", "password:\n"):
        blocks = [
            TextBlock(text="Hello."),
            TextBlock(text=asked),
            TextBlock(text=f"{WORD}\nBye."),
            TextBlock(text="x1"),
        ]
        message = ChatMessage(blocks=blocks)
        redacted = Redactor().message(message)
        assert [block.text for block in message.blocks if isinstance(block, TextBlock)][2] == f"{WORD}\nBye."
        texts = [block.text for block in redacted.blocks if isinstance(block, TextBlock)]
        assert [*texts[:2], texts[3]] == ["Hello.", asked, "x1"]
        assert SHOWN.sub("*", texts[2]) == "*\nBye."
        assert Redactor().message(redacted) is redacted


# --- Every way into a memory ------------------------------------------------------------------------------------


async def _imported(memory: TieredMemory) -> None:
    file = io.BytesIO()
    async with TieredMemory(
        user_id="ann", session_id="other", redaction=None, memory_blocks=[VectorMemoryBlock(embed_model=None)]
    ) as open_to_all:
        await open_to_all.aput(ChatMessage(content=f"My password is {WORD}."), sent_from=AWS)
        await open_to_all.aput(ChatMessage(role="assistant", content=AWS))
        await open_to_all.aremember(f"The password is {WORD}.", {"password": WORD, "n": [AWS]})
        await open_to_all.aflush()
        await open_to_all.aexport(file)
    for _ in range(2):  # again, it is the same session
        file.seek(0)
        report = await memory.aimport(file)
    assert report.skipped == 1
    assert [len(await memory.for_session("other").aget_all()), report.records] == [2, 0]


async def _told(memory: TieredMemory) -> None:
    await memory.aput(ChatMessage(content="x"), sent_from=AWS, send_to=[AWS, "Bob"], cause_by=f"password={WORD}")
    async with memory.view(AWS).observe() as news:
        assert [message.text for message in news] == ["x"]


async def _remembered(memory: TieredMemory) -> None:
    await memory.aremember("a note", {"password": WORD, "deep": [{"x": AWS}], AWS: 1, "kind": "note"})
    assert [one.metadata["kind"] for one in await memory.arecall("note", filter={"password": WORD})] == ["note"]


async def _facts(memory: TieredMemory) -> None:
    block = next(block for block in memory.memory_blocks if isinstance(block, FactExtractionMemoryBlock))
    fact = await block.of(memory).add("It is known.", subject="wifi", relation="password", value=WORD)
    await block.of(memory).edit(fact, value=f"{WORD}!")


async def _stored(memory: TieredMemory) -> None:
    for of_user in (memory, memory.for_session("s", user_id="bob")):
        await of_user.sql_store.add_message("s", ChatMessage(content=f"my key {AWS}"))
        await of_user.sql_store.set_messages("t", [ChatMessage(content=f"my key {AWS}")])


async def _stepped(memory: TieredMemory) -> None:
    block = next(block for block in memory.memory_blocks if isinstance(block, EpisodicMemoryBlock))
    episode = await block.of(memory).start(f"task {AWS}", tags=[AWS])
    call = ToolUse("login", json.dumps({"auth": {"pin": 48213}}), f"token: {RANDOM}")
    await episode.add_step("act", tool_calls=[call])


def _written(folder: Path) -> str:
    return b"".join(path.read_bytes() for path in folder.iterdir()).decode(errors="replace")


@pytest.mark.parametrize("way", [_imported, _told, _remembered, _facts, _stored, _stepped])
async def test_no_way_into_a_memory_passes_by_its_redaction(
    way: Callable[[TieredMemory], Awaitable[None]], tmp_path: Path
) -> None:
    blocks = [
        VectorMemoryBlock(embed_model=None),
        FactExtractionMemoryBlock(llm=ScriptedLLM(lambda _: "[]"), embed_model=None),
        EpisodicMemoryBlock(llm=None, embed_model=None),
    ]
    async with TieredMemory(storage=tmp_path / "m.db", user_id="ann", session_id="s", memory_blocks=blocks) as memory:
        await way(memory)
        await memory.aflush()
    written = _written(tmp_path)
    assert not [secret for secret in (AWS, WORD, RANDOM, "48213") if secret in written]
    assert "[REDACTED:" in written


async def test_a_chat_store_of_its_own_takes_secrets_out_when_it_is_told_to() -> None:
    for redaction, kept in ((None, True), ("default", False), (Redactor(), False)):
        store = TieredChatStore(redaction=redaction)  # type: ignore[arg-type]  # a text of the list's
        await store.add_message("s", ChatMessage(content=AWS))
        assert [message.content == AWS for message in await store.get_messages("s")] == [kept]
        await store.aclose()
    with pytest.raises(ConfigurationError, match="redaction"):
        TieredChatStore(redaction="mine")  # type: ignore[arg-type]  # on purpose


_pieces = st.sampled_from(
    [*(text for text, _ in PHRASES), *(each for all_ in TOKENS.values() for each in all_), *ENGLISH[:40], *CHINESE[:40]]
)
_glue = st.sampled_from(
    ["", " ", "\n", ", ", "，", '"', "'", "password is ", "密码是", "token: ", "=", "://a:", "@b", "\ud800"]
)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.one_of(_pieces, _glue, st.text(max_size=8)), max_size=8).map("".join))
def test_redacting_twice_changes_nothing(text: str) -> None:
    redactor = Redactor()
    once = redactor.text(text)
    assert redactor.text(once) == once
    value = redactor.value({"a": [text], text: text})
    assert redactor.value(value) == value


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=20), st.sampled_from([each for all_ in TOKENS.values() for each in all_]), st.text(max_size=20))
def test_a_token_between_blanks_is_found_in_any_text(before: str, secret: str, after: str) -> None:
    assert secret not in Redactor().text(f"{before} {secret} {after}")


def test_lone_surrogates_and_nul_pass_through() -> None:
    text = f"\ud800 \x00 password={WORD}\udfff tail \ud83d"
    redacted = Redactor().text(text)
    assert redacted.startswith("\ud800 \x00 password=[REDACTED:password:")
    assert redacted.endswith(" tail \ud83d")


def test_hostile_input_costs_linear_work() -> None:
    pytest.importorskip("resource")
    seeds = [
        "password = ",
        'password="',
        "password is ",
        "password for a b ",
        "eyJ-",
        "sk-",
        "://a:",
        "我密码",
        "aws secret ",
        "password:\n",
        "password for a is\n1",
        "passwort ist\n",
        "密码是\n1",
    ]
    seeds.append("-----BEGIN " + "PRIVATE KEY-----")
    code = (
        "import resource; from llama_index_memory_tiers.redaction import Redactor\n"
        # All of this takes about 6 s of a slow core; one expression of quadratic work would take longer than the limit.
        "resource.setrlimit(resource.RLIMIT_CPU, (60, 60))\n"
        f"for seed in {seeds!r}:\n    Redactor().text(seed * (400_000 // len(seed)))\n"
        "for seed in ('a', '-'):\n    assert Redactor().text(seed * 5_000_000) == seed * 5_000_000\n"
        "assert len(Redactor().text('password=' * 555_555)) < 100\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_pattern_of_the_user_is_applied_beside_the_defaults() -> None:
    staff = Pattern("employee-number", re.compile(r"\bE-(?P<secret>\d{5})\b"))
    redactor = Redactor((*DEFAULT_PATTERNS, staff))
    redacted = redactor.text(f"E-12345 uses password={WORD}")
    assert [kind for kind, _ in SHOWN.findall(redacted)] == ["employee-number", "password"]
    assert redacted.startswith("E-[")
    assert redactor.text(redacted) == redacted


def test_a_pattern_that_matches_nothing_at_all_does_no_harm() -> None:
    assert Redactor((Pattern("empty", re.compile(r"x*")),)).text("abc") == "abc"


def test_the_earlier_pattern_names_an_overlap_and_the_whole_of_it_goes() -> None:
    patterns = (Pattern("first", re.compile("bcd")), Pattern("second", re.compile("abc")))
    redacted = Redactor(patterns).text("xabcdx")
    assert re.fullmatch(r"x\[REDACTED:first:[0-9a-f]{6}\]x", redacted)


@pytest.mark.parametrize("kind", ["", "Upper", "with space", "1st", "x" * 33])
def test_a_kind_that_cannot_stand_in_a_placeholder_is_refused(kind: str) -> None:
    with pytest.raises(ConfigurationError, match="kind"):
        Pattern(kind, re.compile("x"))


def test_a_hint_that_could_never_be_found_and_an_empty_key_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="hints"):
        Pattern("x", re.compile("x"), ("X",))
    with pytest.raises(ConfigurationError, match="key"):
        Redactor(key=b"")


def test_the_key_is_not_shown() -> None:
    assert "sesame" not in repr(Redactor(key=b"sesame"))
